"""The processes of one generation: starts, watches, reports and ends them."""
