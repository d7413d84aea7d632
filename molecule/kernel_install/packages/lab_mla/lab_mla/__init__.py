"""A kernel package of the scenario: a tree, copied verbatim."""
