"""The built-in target: the customer-service desk of an online shop. Small enough for a model of 135M parameters."""

from environments.targets.shop.target import ShopTarget, shift, target

__all__ = ["ShopTarget", "shift", "target"]
