"""How updates are coded, one file per codec: `codec=NAME` chooses one."""
