"""Graphs of teams and runs: as data, with a layout, and as SVG pictures and Mermaid flowcharts."""
