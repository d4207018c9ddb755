"""The judge: reads records and plans, never the engine."""
