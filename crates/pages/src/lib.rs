//! Page algorithms, pure.
