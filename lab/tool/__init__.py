"""The program behind `lab/lab` and `lab/demo`: lab hosts without GPUs, in containers with real systemd and sshd."""
