"""The code inside a rank: hook, session, sentinel. The package `training` is cheap to import, and needs no control plane."""
