"""What runs inside of an SGLang scheduler: built on its classes, imported by nothing but the engine."""
