"""Prediction targets: one small class per kind of target, with its loss, metrics and labels.

Built-in classes are named in the registry's group `tasks`; packages add others by an entry point of the group
`fedfrozen.tasks` (name = "module:Class").
"""
