"""Language models of others through LiteLLM: one client, one spending cap, the analyst and API policies."""
