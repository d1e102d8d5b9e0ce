from tests.mutants.mutants import main

if __name__ == "__main__":
    main()
