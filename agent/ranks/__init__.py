"""The processes of one generation: started, watched, reported, ended."""
