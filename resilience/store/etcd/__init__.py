"""The store on a cluster's etcd: client, members, watches, leases."""
