"""What answers the users of a target: releases, their promotion and rollback, in the store and in MLflow alike."""
