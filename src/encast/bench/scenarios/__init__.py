"""What can be measured: one file each, behind the interface of ``base``."""
