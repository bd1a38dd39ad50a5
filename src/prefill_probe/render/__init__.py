"""One record, in the forms that people and programs read."""
