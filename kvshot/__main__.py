from kvshot.cli import main

main()
