"""How clients' low-rank adapters become one: a file for each rule, chosen by `adapter.rule`."""
