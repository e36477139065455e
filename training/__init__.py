"""What lives inside a rank: the hook, the session, the sentinel. Cheap to import; knows no control plane."""
