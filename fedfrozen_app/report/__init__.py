"""Pages, tables and comparisons, made from the files of a run."""
