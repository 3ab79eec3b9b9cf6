"""``freetrain demo``, and nodes whose processes are forked from one that has imported torch."""
