"""Complete modules of the contract, shown to the model that writes new ones, and proved by the tests."""
