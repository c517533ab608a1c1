"""The paper as data: its tables and figures, what was published, and what stands for it at a scale."""
