// The log files: their content, and what happens when they cannot be written.
#include "inspect/logs.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include "core/error.h"
#include "fakes.h"

// Replaces fdatasync() of the C library, and stores the sizes of the files that were synchronised.
static std::vector<off_t> g_synchronised;
extern "C" int fdatasync(int file) {
  struct stat status {};
  fstat(file, &status);
  g_synchronised.push_back(status.st_size);
  return 0;
}

namespace te::inspect {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Clock at(const char* utc_seconds_and_milliseconds) {
  const std::chrono::milliseconds time(std::stoll(utc_seconds_and_milliseconds));
  return [time] { return std::chrono::system_clock::time_point(time); };
}

class LogsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("TZ", "UTC", 1);
    tzset();
  }

  LogOptions options() const {
    LogOptions result;
    result.directory = folder.path();
    result.rank = 3;
    return result;
  }

  Folder folder;
  const std::string messages = folder / "nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-3.log";
  const std::string statistics =
      folder / "nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-3.log";
  const std::string rows = folder / "statistics_rank-3.jsonl";
};

TEST_F(LogsTest, Formats) {
  Logs logs(options(), at("1738300317884"));
  EXPECT_EQ(logs.message(20, "Loaded."), std::nullopt);
  EXPECT_EQ(logs.message(30, "Careful."),
            "NVDLFW INSPECT - 2025-01-31 05:11:57,884 - WARNING - Careful.");
  EXPECT_EQ(logs.message(10, "Detail."), std::nullopt);
  logs.add({2, "l.fc1", "activation", "max", "l.fc1_activation_max", 4.31884});
  EXPECT_EQ(read(statistics), "") << "is written by flush";
  EXPECT_EQ(logs.flush(), std::nullopt);
  EXPECT_EQ(
      read(messages),
      "2025-01-31 05:11:57,884 - INFO - Loaded.\n2025-01-31 05:11:57,884 - WARNING - Careful.\n");
  EXPECT_EQ(read(statistics),
            "2025-01-31 05:11:57,884 - INFO - l.fc1_activation_max \t\t\t\t iteration=000002 "
            "\t\t\t\t value=4.3188\n");
  EXPECT_EQ(read(rows),
            R"({"iteration": 2, "layer": "l.fc1", "tensor": "activation", "statistic": "max", )"
            R"("name": "l.fc1_activation_max", "value": 4.31884, "rank": 3})"
            "\n");
}

TEST_F(LogsTest, LastBeyondTheEndOfTheSession) {
  Logs logs(options());
  logs.message(20, "Loaded.");
  logs.add({2, "l.fc1", "activation", "max", "l.fc1_activation_max", 4.31884});
  logs.flush();
  g_synchronised.clear();
  logs.add({3, "l.fc1", "activation", "max", "l.fc1_activation_max", 1.0});
  EXPECT_EQ(logs.finish(), std::nullopt);
  ASSERT_EQ(g_synchronised.size(), 3U);
  const auto size = [](const std::string& path) { return static_cast<off_t>(read(path).size()); };
  EXPECT_EQ(g_synchronised, (std::vector<off_t>{size(messages), size(statistics), size(rows)}));
}

TEST_F(LogsTest, WithoutTimestamps) {
  LogOptions plain = options();
  plain.timestamps = false;
  plain.stamp = "20250131_051157";
  plain.level = 30;
  Logs logs(plain);
  logs.message(20, "quiet");
  logs.message(40, "loud");
  EXPECT_EQ(read(folder / "nvdlfw_inspect_logs/nvdlfw_inspect_20250131_051157_globalrank-3.log"),
            "ERROR - loud\n");
}

TEST_F(LogsTest, WithoutFilesOfStatistics) {
  LogOptions some = options();
  some.statistics = false;
  Logs logs(some);
  logs.message(20, "Loaded.");
  logs.add({2, "l.fc1", "activation", "max", "l.fc1_activation_max", 4.31884});
  EXPECT_EQ(logs.finish(), std::nullopt);
  EXPECT_NE(read(messages).find("Loaded."), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(statistics));
  EXPECT_FALSE(std::filesystem::exists(rows));
}

TEST_F(LogsTest, ValuesOfAllKinds) {
  EXPECT_EQ(text_of_value(-0.00004), "-0.0000");
  EXPECT_EQ(text_of_value(1e300).size(), 306u);
  EXPECT_EQ(text_of_value(-kNan), "nan");
  EXPECT_EQ(text_of_value(-kInf), "-inf");
  const auto json = [](std::optional<double> value) {
    const std::string line = json_of_row({0, "a\"b\\\n", "t", "s", "n", value}, 0);
    EXPECT_NE(line.find(R"("layer": "a\"b\\\u000a")"), std::string::npos) << line;
    const size_t begin = line.find("value\": ") + 8;
    return line.substr(begin, line.find(", \"rank") - begin);
  };
  EXPECT_EQ(json(0.1), "0.1");
  EXPECT_EQ(json(3), "3.0");
  EXPECT_EQ(json(1.0 / 3), "0.3333333333333333");
  EXPECT_EQ(json(5e-324), "5e-324");
  EXPECT_EQ(json(kNan), R"("nan")");
  EXPECT_EQ(json(kInf), R"("inf")");
  EXPECT_EQ(json(-kInf), R"("-inf")");
  EXPECT_EQ(json(std::nullopt), "null");
}

TEST_F(LogsTest, EmptyTensorsHaveNoTextLine) {
  Logs logs(options());
  logs.add({0, "l", "t", "min", "l_t_min", std::nullopt});
  logs.flush();
  EXPECT_EQ(read(statistics), "");
  EXPECT_NE(read(rows).find("null"), std::string::npos);
}

TEST_F(LogsTest, NamesDoNotSplitLines) {
  Logs logs(options(), at("0"));
  logs.add({0, "l\n", "t", "s", "l\n_t_s", 1.0});
  logs.flush();
  EXPECT_EQ(read(statistics),
            "1970-01-01 00:00:00,000 - INFO - l\\u000a_t_s \t\t\t\t iteration=000000 \t\t\t\t "
            "value=1.0000\n");
}

TEST_F(LogsTest, TextStartsAnewAndRowsAreAppended) {
  for (int run = 0; run < 2; ++run) {
    Logs logs(options());
    logs.message(20, "run");
    logs.add({run, "l", "t", "min", "l_t_min", 1.0});
    logs.flush();
  }
  const auto lines = [](const std::string& text) {
    return std::count(text.begin(), text.end(), '\n');
  };
  EXPECT_EQ(lines(read(messages)), 1);
  EXPECT_EQ(lines(read(statistics)), 1);
  EXPECT_EQ(lines(read(rows)), 2);
}

TEST_F(LogsTest, EndsALineThatWasCutShort) {
  folder.write("statistics_rank-3.jsonl", "{\"iteration\": 1}\n{\"itera");
  Logs logs(options());
  logs.add({0, "l", "t", "s", "n", 1.0});
  logs.flush();
  const std::string text = read(rows);
  EXPECT_TRUE(text.starts_with("{\"iteration\": 1}\n{\"itera\n{\"iteration\": 0")) << text;
}

TEST_F(LogsTest, RefusesADirectoryThatCannotBe) {
  folder.write("file", "");
  LogOptions bad = options();
  bad.directory = folder / "file";
  EXPECT_THROW(Logs{bad}, Error);
}

TEST_F(LogsTest, WithoutADirectoryNothingIsWritten) {
  Logs logs({});
  logs.add({0, "l", "t", "s", "n", 1.0});
  EXPECT_EQ(logs.message(20, "text"), std::nullopt);
  EXPECT_TRUE(logs.message(30, "text"));
  EXPECT_EQ(logs.flush(), std::nullopt);
}

// Simulates a full disk: as long as this exists, files of this process can only grow to `bytes`.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, SIG_DFL);
  }

 private:
  rlimit before_{};
};

TEST_F(LogsTest, KeepsWhatCannotBeWrittenAndWarnsOnce) {
  Logs logs(options());
  const auto add = [&](int64_t iteration) { logs.add({iteration, "l", "t", "s", "n", 1.0}); };
  {
    const FullDisk disk(100);  // room for one line and a part of the next
    for (int64_t i = 0; i < 5; ++i) add(i);
    const auto warning = logs.flush();
    ASSERT_TRUE(warning);
    EXPECT_NE(warning->find("globalrank-3.log"), std::string::npos) << *warning;
    add(5);
    EXPECT_EQ(logs.flush(), std::nullopt);
  }
  EXPECT_EQ(logs.flush(), std::nullopt);
  std::istringstream lines(read(rows));
  std::string line;
  for (int64_t i = 0; i < 6; ++i) {
    ASSERT_TRUE(std::getline(lines, line));
    EXPECT_EQ(line + "\n", json_of_row({i, "l", "t", "s", "n", 1.0}, 3));
  }
  EXPECT_FALSE(std::getline(lines, line));
}

TEST_F(LogsTest, SaysAtTheEndWhatIsLost) {
  Logs logs(options());
  logs.add({0, "l", "t", "s", "n", 1.0});
  logs.flush();
  EXPECT_EQ(logs.finish(), std::nullopt);
  const FullDisk disk(1);
  logs.add({1, "l", "t", "s", "n", 1.0});
  const auto lost = logs.finish();
  ASSERT_TRUE(lost);
  const size_t bytes = json_of_row({1, "l", "t", "s", "n", 1.0}, 3).size();
  EXPECT_NE(lost->find(concat("the last ", bytes, " bytes of ", rows)), std::string::npos) << *lost;
}

TEST_F(LogsTest, GoesOnInNewFilesWhereSomebodyRemovedThem) {
  Logs logs(options());
  logs.add({0, "l", "t", "s", "n", 1.0});
  logs.flush();
  std::filesystem::remove_all(folder.path());
  logs.add({1, "l", "t", "s", "n", 1.0});
  const auto said = logs.flush();
  ASSERT_TRUE(said);
  EXPECT_NE(said->find(rows + " was removed"), std::string::npos) << *said;
  EXPECT_EQ(read(rows), json_of_row({1, "l", "t", "s", "n", 1.0}, 3));
  EXPECT_EQ(logs.flush(), std::nullopt);
}

// Runs a function in a forked process, and returns its exit status.
int in_child(const std::function<int()>& run) {
  const pid_t child = fork();
  if (child == 0) _exit(run());
  int status = 0;
  waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

bool refused(const LogOptions& options) {
  return in_child([&] {
           try {
             Logs other(options);
           } catch (const Error& error) {
             return std::string(error.what()).find("no other process") == std::string::npos ? 2 : 1;
           }
           return 0;
         }) == 1;
}

TEST_F(LogsTest, RefusesADirectoryThatAnotherProcessLogsTo) {
  Logs logs(options());
  EXPECT_TRUE(refused(options()));
  for (const std::string& file : {messages, statistics, rows}) read(file);
  EXPECT_TRUE(refused(options())) << "also after this process has read the files";
  in_child([&] { return logs.finish() ? 1 : 0; });
  EXPECT_TRUE(refused(options())) << "also after a forked child has left the session";
  logs.finish();
  EXPECT_FALSE(refused(options()));
}

TEST_F(LogsTest, ForkedChildrenThatOutliveTheirParentLockNothing) {
  int ends[2];
  char byte = 0;
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  in_child([&] {
    Logs logs(options());
    if (fork() > 0) return 0;
    close(ends[0]);
    const auto written = write(ends[1], &byte, 1);
    _exit(static_cast<int>(written - ::read(ends[1], &byte, 1)));  // waits for the end of the test
  });
  ASSERT_EQ(::read(ends[0], &byte, 1), 1);
  EXPECT_FALSE(refused(options()));
  close(ends[0]);
  close(ends[1]);
}

TEST_F(LogsTest, ForkedChildrenDoNotWaitForThreadsOfTheirParent) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer leaves its allocator locked in children; tests/inspect/"
                  "test_exits.py has the same test without it";
#endif
  Logs logs(options());
  const std::string name(100'000, 'n');
  const auto log = [&] {
    logs.message(20, name);
    logs.add({0, "l", "t", "s", name, 1.0});
    logs.flush();
  };
  std::atomic<bool> stop = false;
  std::thread thread([&] {
    while (!stop) log();
  });
  constexpr int kDone = 7;
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(in_child([&] {
                alarm(20);
                log();
                return logs.finish() ? 1 : kDone;
              }),
              kDone);
    if (HasFailure()) break;
  }
  stop = true;
  thread.join();
}

TEST_F(LogsTest, ASessionThatCannotBeginLeavesEarlierLogs) {
  {
    Logs logs(options());
    logs.message(20, "Loaded.");
    logs.add({0, "l", "t", "s", "n", 1.0});
    logs.finish();
  }
  const std::string before = read(messages) + read(statistics);
  std::filesystem::remove(rows);
  std::filesystem::create_directory(rows);
  EXPECT_THROW(Logs{options()}, Error);
  EXPECT_EQ(read(messages) + read(statistics), before);
}

TEST_F(LogsTest, WritesBetweenFlushesWhatIsBeyondTheBound) {
  LogFile file(folder / "f");
  const std::string line(1023, 'x');
  constexpr size_t kLines = 2 * LogFile::kBound / 1024;
  for (size_t i = 0; i < kLines; ++i) file.add(line + "\n");
  EXPECT_TRUE(file.flush());
  EXPECT_EQ(file.dropped(), 0u);
  EXPECT_EQ(read(folder / "f").size(), kLines * 1024);
}

TEST_F(LogsTest, KeepsTheNewestLinesUpToTheBound) {
  LogFile file(folder / "f");
  const std::string line(1023, 'x');
  {
    const FullDisk disk(100);
    file.add("a line of which only the beginning can be written" + line + "\n");
    EXPECT_FALSE(file.flush());
    for (size_t i = 0; i < 2 * LogFile::kBound / 1024; ++i) file.add(line + "\n");
    file.add("the last\n");
    EXPECT_FALSE(file.flush());
  }
  EXPECT_TRUE(file.flush());
  const std::string text = read(folder / "f");
  EXPECT_GT(file.dropped(), 0u);
  EXPECT_LE(text.size(), LogFile::kBound + 2048);
  EXPECT_TRUE(text.ends_with("x\nthe last\n"));
  EXPECT_EQ(text.find('\n'), 49u + 1023) << "the line that had begun is whole";
}

}  // namespace
}  // namespace te::inspect
