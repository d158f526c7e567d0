"""The controller: owns the state, plans, tells the daemon what to run, publishes routes."""
