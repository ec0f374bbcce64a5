"""The files of an operator's kit."""

OPERATOR_YAML = """\
# Read by `fedfrozen runtime=deployed runtime.server_kit=THIS_FOLDER`.
server: @superlink
"""

OPERATOR_README = """\
# The kit of the operator @name

This kit can start and stop runs: protect `operator.key` accordingly. Once the server has admitted
`operator.crt`, on the server's machine (results are written there), with a folder of test data:

    fedfrozen runtime=deployed runtime.server_kit="$PWD" runtime.min_nodes=2 dataset=images dataset.path=DIR

The account that runs the server must be able to write `output_dir`. After a crash: `fedfrozen resume RUN`.

Renew the certificate before it ends: `fedfrozen site renew .`, send `@name.csr` to the authority, and
`fedfrozen site install RECEIVED .`; the server admits the new `operator.crt`.
"""

OPERATOR = {"operator.yaml": OPERATOR_YAML, "README.md": OPERATOR_README}
