"""The command line: a module a verb, imported when the verb runs."""
