"""The verbs of the command, one file per group of `fedfrozen --help`. `verb_table` puts them together."""
