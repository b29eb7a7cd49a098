"""The runtimes that are compared: one file each, behind the interface of ``base``."""
