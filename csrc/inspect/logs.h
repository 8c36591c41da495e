// The log files of a session: messages, statistics as text, and statistics in full precision as
// JSON lines.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "inspect/fork_mutex.h"
#include "inspect/log_file.h"
#include "inspect/messages.h"

namespace te::inspect {

using Clock = std::function<std::chrono::system_clock::time_point()>;

struct LogOptions {
  std::string directory;   // empty: no files
  bool statistics = true;  // false: only the file of messages
  int rank = 0;
  std::string stamp;         // in the names of the text files: 20250131_051157
  bool append_text = false;  // false: text files of earlier sessions are truncated
  bool append_rows = true;
  bool timestamps = true;    // at the beginning of every line
  int level = level::kInfo;  // messages of a lower level are not written
};

struct StatisticRow {
  int64_t iteration = 0;
  std::string layer, tensor, statistic, name;
  std::optional<double> value;  // absent for an empty tensor
};

// "1.2346"; "nan", "inf", "-inf"
std::string text_of_value(double value);
// Escapes control characters, as JSON does, so that a name with a line feed does not split a line.
std::string one_line(const std::string& text);
// One line of statistics_rank-R.jsonl, with its newline.
std::string json_of_row(const StatisticRow& row, int rank);
// "2025-01-31 05:11:57,884", local time
std::string text_of_time(std::chrono::system_clock::time_point time);

// All members may be called on any thread.
class Logs {
 public:
  // Throws Error (Value) if the directory cannot be written.
  explicit Logs(LogOptions options, Clock clock = std::chrono::system_clock::now);

  // Writes a message at once. Returns the line if its level is to be printed.
  std::optional<std::string> message(int level, const std::string& text);
  void add(const StatisticRow& row);  // written by flush()

  // Writes the files. Returns warnings about the first failure of the session (but not about later
  // failures), and about files that were removed.
  std::optional<std::string> flush();

  // Ends the session: writes and synchronises the files, and unlocks them. Returns a message if
  // lines are lost.
  std::optional<std::string> finish();

  const LogOptions& options() const { return options_; }

 private:
  std::array<LogFile*, 3> files() const {
    return {messages_.get(), statistics_.get(), rows_.get()};
  }
  std::string stamped(int level, const std::string& text) const;

  const LogOptions options_;
  const Clock clock_;
  ForkMutex mutex_;  // protects the members below
  std::unique_ptr<LogFile> messages_, statistics_, rows_;
  bool complained_ = false;
};

}  // namespace te::inspect
