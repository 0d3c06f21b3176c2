"""The update mathematics as pure functions, each formula written once."""
