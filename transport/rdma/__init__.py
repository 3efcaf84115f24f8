"""Chunks as tagged UCX messages, over RDMA or whatever UCX has."""
