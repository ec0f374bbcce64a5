"""For whom does a model fail? Its figures by site, by class and by group, and how sure they are."""
