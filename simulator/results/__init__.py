"""What comes of simulated runs: text, plots, sensitivities, a closed form."""
