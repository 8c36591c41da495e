"""The precision debugger's side of `transformer_engine`: what it does inside layers."""
