"""An artifact as a service: HTTP and gRPC in front, a queue and instances behind; see README.md in this folder."""
