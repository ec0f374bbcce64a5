"""Codecs of updates, one file each: `codec=NAME` chooses one."""
