"""Where the time of a forward goes, step by step, against what the machine can do: ``encast profile``."""
