// What the user gets to see: the table, the JSON and the CSV.
#pragma once

#include "profile/backend.h"
#include "profile/measure.h"
#include "profile/options.h"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace fa101::profile {

// Throws BadArgument when --json or --csv name a file that cannot be written: now, not after
// minutes of work, and without touching what is in it.
void require_writable_files(const Arguments& args);

class Report {
  public:
    // Prints the device.
    Report(const Arguments& args, const Backend& backend, DType dtype);

    // Prints the problem and the head of its table. `workload` is null where the problem does not
    // fit into memory.
    void begin(const Sizes& sizes, const Workload* workload);
    void add(const Row& row);
    void write_files() const;

    const std::vector<Row>& rows() const { return rows_; }

  private:
    void add_to_csv(const Row& row);

    const Arguments& args_;
    Sizes sizes_;
    std::string device_, dtype_;
    std::vector<Row> rows_;
    nlohmann::ordered_json json_;
    std::string csv_;
};

}  // namespace fa101::profile
