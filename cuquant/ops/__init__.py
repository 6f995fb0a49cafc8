"""The operations: each checks its arguments, plans, and runs on the backend where its arrays live."""
