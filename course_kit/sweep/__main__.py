from course_kit.sweep.program import main

main()
