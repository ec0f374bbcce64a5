"""`import fedfrozen`: runs, sweeps and comparisons from Python. The module `fedfrozen` is this room's door.

    run = fedfrozen.run("strategy=fedfrozen", "partition.alpha=0.1", num_rounds=10)
    run.metrics, run.clients, run.summary, run.model(), run.plot()

What the command line would refuse is a `UserError` here, with the same sentence; a run that fails is a
`RunFailed`.
"""
