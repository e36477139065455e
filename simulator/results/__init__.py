"""Results of simulated runs: text, plots, sensitivities, a closed form."""
