"""What a run predicts: one small class for each kind of target, with its loss, its metrics and its labels.

Built-in classes are named in the registry's group `tasks`; a package brings another by an entry point of the
group `fedfrozen.tasks` (name = "module:Class").
"""
