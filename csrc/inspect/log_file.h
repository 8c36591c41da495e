// A file to which lines are appended, with one write per flush. Lines that cannot be written stay
// in memory (up to a bound), so that nothing is lost if a disk is full for a while.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "inspect/source_text.h"

namespace te::inspect {

class LogFile {
 public:
  // Creates the parent folders, and locks the file. Throws Error (Value) if the file cannot be
  // written or another process writes it.
  explicit LogFile(std::string path);
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  // To be called first. With `append`, keeps the content of the file, and ends a last line that has
  // no newline; else empties the file.
  void begin(bool append);

  // Buffers a line, which must end in a newline. A buffer larger than kBound is written. If that
  // fails, its oldest lines are dropped.
  void add(std::string_view line);

  // Writes the buffer. Returns false if a part of it could not be written. That part stays in the
  // buffer, and error() has the reason.
  bool flush();

  // Synchronises the file with the disk, so that a power failure loses nothing.
  void synchronize();

  // Unlocks the file for other processes. Lines that are added later are still written.
  void release();

  std::string path() const { return to_utf8(path_); }  // for messages
  const std::string& error() const { return error_; }
  // Returns true once after the file was removed and a new one was created.
  bool was_removed();
  size_t dropped() const { return dropped_; }             // lines
  size_t unwritten() const { return unwritten_.size(); }  // bytes

  static constexpr size_t kBound = 16 << 20;  // bytes buffered

 private:
  void open_file();
  void lock();
  void end_torn_line();
  void replace_removed();
  void drop_oldest();

  const std::string path_;
  int file_ = -1;             // -1 in forked children, which do not write files of their parent
  bool inside_line_ = false;  // a part of the first buffered line has been written
  std::string unwritten_;
  std::string error_;
  size_t dropped_ = 0;
  bool removed_ = false;
};

}  // namespace te::inspect
