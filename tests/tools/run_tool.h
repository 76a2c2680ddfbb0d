// Runs a command-line tool as a user would.
#ifndef ISOBIT_TESTS_TOOLS_RUN_TOOL_H_
#define ISOBIT_TESTS_TOOLS_RUN_TOOL_H_

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

#include "gtest/gtest.h"

namespace isobit::testing_support {

struct Outcome {
  int exit_code;
  std::string output;  // stdout and stderr
};

// Runs `binary arguments` through the shell.
inline Outcome RunTool(const std::string& binary, const std::string& arguments) {
  const std::string line = binary + " " + arguments + " 2>&1";
  std::FILE* pipe = popen(line.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  Outcome outcome = {-1, ""};
  std::array<char, 4096> buffer;
  size_t size = 0;
  while ((size = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0) {
    outcome.output.append(buffer.data(), size);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  return outcome;
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_TOOLS_RUN_TOOL_H_
