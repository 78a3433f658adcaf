"""How far a program scales before accuracy pays."""
