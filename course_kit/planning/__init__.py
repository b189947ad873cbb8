"""How far notebook 11's planner is from measured runs: published runs, fits to them, and the regret of its picks."""
