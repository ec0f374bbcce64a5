"""From files to rows to partitions: readers, tables, and how rows are dealt to clients."""
