// A file that lines are added to: one write per flush, and nothing lost while the disk is full for
// a while.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace te::inspect {

class LogFile {
 public:
  // Creates the folders above. With `append`, what is there stays, and a last line that was cut
  // short is ended. Throws Error (Value) where the file cannot be written, or another process
  // does.
  LogFile(std::string path, bool append);
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  // Keeps the line, which must end in a newline, for the next flush. Beyond the bound the oldest
  // lines go.
  void add(std::string_view line);

  // Writes the buffer. False: a part could not be written and stays buffered for the next time;
  // error() says why.
  bool flush();

  // Waits until what was written is on the disk, where a power failure leaves it.
  void synchronize();

  // Lets other processes have the file. What is still added goes into it all the same.
  void release();

  const std::string& path() const { return path_; }
  const std::string& error() const { return error_; }
  // Somebody has removed the file, and a new one took its place: told once.
  bool was_removed();
  size_t dropped() const { return dropped_; }             // lines
  size_t unwritten() const { return unwritten_.size(); }  // bytes

  static constexpr size_t kBound = 16 << 20;  // bytes buffered while writing fails

 private:
  void open_file();
  void lock();
  void end_torn_line();
  void replace_removed();

  const std::string path_;
  const int process_;  // a forked child keeps out of its parent's files
  int file_ = -1;
  bool inside_line_ = false;  // a part of the first buffered line has been written
  std::string unwritten_;
  std::string error_;
  size_t dropped_ = 0;
  bool removed_ = false;
};

}  // namespace te::inspect
