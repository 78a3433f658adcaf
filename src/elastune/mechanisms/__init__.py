"""How one replica lies on devices and how its gradients are summed."""
