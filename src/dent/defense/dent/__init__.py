"""The paper's method: Delta, Sigma, the objective, the update, and the settings by name."""
