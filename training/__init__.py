"""The code inside a rank: hook, session, sentinel. It is cheap to import, and needs no control plane."""
