"""Looking before and after: what a run would do, what runs there are, whether this machine is fit for one."""
